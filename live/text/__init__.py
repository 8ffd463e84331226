"""Text to token ids and back. This package knows neither models nor engines.

tokenizer     the tokenizer of a directory             chat    conversations as text, by chat templates
detokenizer   the bytes of tokens, incrementally       stream  output text, token by token, and stop strings
fast_encoder  a faster encoder, checked on texts on which two encoders are likely to differ
"""
