"""The agent of a host: starts its ranks, forwards their output, and ends them when its connection ends."""

import os

START_AGENT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start_agent.py")
"""The path of the script that starts an agent."""
