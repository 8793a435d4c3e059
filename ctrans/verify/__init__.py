"""The theory under test: every lemma, theorem, proposition and corollary as an executable check, errata included."""
