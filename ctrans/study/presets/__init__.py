"""The papers' experiments at a size that a laptop trains: claims, studies that try them, verdicts."""
