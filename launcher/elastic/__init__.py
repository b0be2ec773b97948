"""Elastic jobs: the driver, which starts workers, replaces those that fail, and says who is a member.

==================== ===================================================================================================
``membership``       pure: all decisions; ``events`` are what goes in and comes out, ``state`` what it knows, and
                     ``cooldown`` when a host may have workers again
==================== ===================================================================================================
"""
