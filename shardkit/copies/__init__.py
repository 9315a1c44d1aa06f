"""Copies of a root's objects: the policy that asks for them, parity, replicating, checking and repairing.

Everything here may be lost and made again from one good copy or enough parity.
"""
