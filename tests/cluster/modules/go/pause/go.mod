module gptddp.test/pause

go 1.24
