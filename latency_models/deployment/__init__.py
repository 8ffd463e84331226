"""Specifications of devices (`hardware`) and models (`models`), and latency lines derived from them (`roofline`)."""
