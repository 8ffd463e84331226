"""The what-if page: a serving scenario whose fields one changes in a browser, and answers that follow.

`knobs` says what can be changed, `questions` what is computed of it, `worker` is the process that does, `view` shows
it, and `application` connects these for each open page.
"""
