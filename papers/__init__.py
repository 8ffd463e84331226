"""Papers computed again, a folder each: scenarios and wording (YAML), published tables (CSV), and programs.

`reproduction` computes a paper's document and shows it; `quality` does so for claims about accuracy, on small models
that `training` trains here. The rest of the house does not import this package: `twin reproduce`
loads a paper when it is asked for.
"""
