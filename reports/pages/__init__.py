"""Parts of pages that one can explore, made with Bokeh: the frame, charts, the explorer of points, and tables."""
