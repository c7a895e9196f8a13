"""Messages between processes of one host, one protocol for all backends: authenticated, framed, data only.

packing.py          a message as msgpack bytes, and back
schema.py           every kind of message with its fields, and the check of received ones
framing.py          one end of a stream socket: messages in frames, each checked as it is received
report_channel.py   reports and acknowledgements between the coordinator and the training actors on its host
"""
