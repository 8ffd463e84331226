"""Text to token ids and back: tokenizers, chat templates, and answers that come token by token."""
