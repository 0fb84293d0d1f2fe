def pause(engines):
    for engine in engines:
        engine.pause.remote()
