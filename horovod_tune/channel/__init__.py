"""Messages between processes of one host, one protocol for all backends: authenticated, framed, data only.

packing.py          a message as msgpack bytes, and back
framing.py          one end of a stream socket: every kind of message with its fields, in checked frames
report_channel.py   reports and acknowledgements between the coordinator and the training actors on its host
"""
