"""`make bench`: the time of ctrans next to its peers and next to the machine's limit, on one
page.
"""
