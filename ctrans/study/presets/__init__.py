"""The experiments of the papers, at a size for a laptop: claims, studies and verdicts."""
