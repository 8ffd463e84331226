"""Engines in processes of their own: replicas, prefill and decode apart, and decode engines that models share.

layout      the engines and who serves which model, and the forms of their messages
frontend    routes requests to engines, by `schedulers.routing`, and from prefill to decode engines
worker      one engine, which sends and receives KV blocks
"""
