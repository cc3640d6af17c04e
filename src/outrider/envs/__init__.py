"""Environments: any Gymnasium environment, and Atari games.

Every one of them ends in the one form of :class:`outrider.data.Step`, whatever it is made of.
"""
