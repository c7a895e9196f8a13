"""`horovod-tune launch`: a script on a cluster. Runs on the machine that you type on."""
