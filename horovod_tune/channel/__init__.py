"""Messages between processes of one host, one protocol for both backends: authenticated, framed, data only.

packing.py          a message as msgpack bytes, and back
schema.py           every kind of message with its fields; the one check of what has come
framing.py          one end of a stream socket: messages in frames, each checked as it is received
report_channel.py   reports and acknowledgements between the coordinator and training actors, for ranks of the
                    same user with the secret of their assignment
"""
