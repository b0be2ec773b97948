"""The agent of a host: starts its ranks, forwards their output, and ends them with the connection."""

import os

START_AGENT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start_agent.py")
"""The program that starts an agent."""
