"""Messages between processes of one host: authenticated, framed, data only.

packing.py   a message as msgpack bytes, and back
packets.py   coordinator and ranks: one packet a message; a rank shows its secret when it connects
stream.py    a TPU host's actor and its ranks: one frame a message on an inherited socket
"""
