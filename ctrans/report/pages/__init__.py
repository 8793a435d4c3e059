"""What each command shows: one module for each, which makes chapters from the command's JSON."""
