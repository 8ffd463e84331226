"""Small tables of facts that the papers print, as data files; read with `importlib.resources`."""
