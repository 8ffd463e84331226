"""Reports of runs: the record store, metric definitions, tables, figures and the HTML page.

This package turns records into documents for people and programs. It imports no other package.
"""
