import threading

threading.Thread(target=threading.Event().wait, name="of an import", daemon=True).start()
