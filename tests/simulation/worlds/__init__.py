"""Worlds: the ledgers as they are, with model generators and trainers, under every order of events and every fault.

setup.py      what a world is made of, and the faults that may happen in it
generators.py a rank that samples          trainers.py  the ranks that train
world.py      the network between them, and what may happen next
rules.py      what must hold after every event
playing.py    a world by drawn events; a failing one is shortened to a readable story
search.py     a small world by every order of events
schedules.py  thousands of random worlds, stopped and resumed; what they covered
"""
