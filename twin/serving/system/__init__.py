"""Systems: pools of engines, routers, links and autoscalers, and the topologies that put them together."""
