"""Tables, figures and the page of plans."""
