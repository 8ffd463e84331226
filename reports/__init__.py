"""What was seen: the record store (a leaf), metric definitions, tables, figures and the HTML page.

May live here: whatever turns records into something a person or a program reads. Imports `reports.records` only.
"""
