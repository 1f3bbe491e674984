"""Every private name of a library that labkit relies on, and nowhere else.

One module a library, or a part of torch; one function a use, which says why. None loads
a library that its importer would not load. `GATE.check()` of a module says in one line
what the installed version lacks.
"""
