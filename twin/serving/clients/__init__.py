"""Clients, which send requests and sessions."""
