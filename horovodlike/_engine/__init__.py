"""The layer between Python and the C API of the engine (`hvl.h`): requests, handles, options, providers."""
