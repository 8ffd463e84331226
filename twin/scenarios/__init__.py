"""What a user asks for: scenario files, `--set` overrides and `--ratio` lists, checked before anything runs."""
