"""Steps of fixed sizes: inputs that stay where they are, padded, so that a GPU can replay a step as one graph.

buckets   the sizes that steps are padded to     staging   a step's arrays in one piece of memory
resident  what stays on the device               step      a padded step: run, captured, replayed
wishes    how tokens are drawn                   executor  batches, run by such steps
"""
