"""The search over edits of a model that lower its loss: `edit_search.search_edits`, and the table
of edits, `edits.EDITS`.
"""
