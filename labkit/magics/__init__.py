"""The face in IPython: parse, delegate, show."""
