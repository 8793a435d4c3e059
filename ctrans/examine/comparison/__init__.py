"""Where two models part, and whether it matters: local defects, what rounding explains, and each
part's share of the difference of the losses.
"""
