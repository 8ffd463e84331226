"""The what-if page: a serving scenario whose fields one changes in a browser, and answers that follow.

`questions` says what can be changed and what is computed of it, `view` shows it, and `application` connects these for
each open page, with a process that computes.
"""
