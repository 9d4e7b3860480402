"""The scheduler and what it decides with. Pure: no clock, thread, asyncio, os or openvino in here."""
