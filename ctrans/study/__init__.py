"""Studies: many trainings, described, carried out, kept and asked what they show."""
