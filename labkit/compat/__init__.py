"""Every private name of a library that labkit relies on, and nowhere else.

One module a library, or a part of torch; one function a use, which says why. Importing
one of them imports its library. `GATE.check()` of a module says in one line what the
installed version lacks.
"""
