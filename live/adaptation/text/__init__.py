"""Language models of text that every Python carries: the sources of its standard library.

corpus          files, held out by name        tokenizer       bytes, or byte pairs trained on the corpus
language_model  training windows, perplexity   sampling        text that a model writes itself
tasks           what a model is fine-tuned for: brackets, docstrings
pairs           prompts and answers of one's own, for any model directory
"""
