"""Station (4): the agents. One file each: config, loss, agent; the acting half is all that actors build.

:mod:`~outrider.agents.networks` builds modules and encodes observations, :mod:`~outrider.agents.flat` lays their
parameters into one vector that is trained, averaged and published as a whole, and
:mod:`~outrider.agents.acting` acts on such a vector, in numpy where it can.
"""
