"""Requests and their arrival: length distributions, arrival processes, mixes, shared prefixes and trace readers.

This package has the `Request` that a client submits, families of lengths and of arrivals (small classes that draw from
a given generator), mixes of models and of tasks, the `Workload` that makes requests of all these, and readers of
traces. It also has two modules that every package may need: the root of the exception tree (`workloads.errors`) and
the bounded reader of JSON files (`workloads.json_files`). It knows neither step times nor schedulers, and imports no
other package. A scheduler that imports `workloads.request` stays free of numpy.
"""
