"""`bin/demo`: a small world around a broker that is killed half-way, and the proof that nothing was lost.

story           what happens, in which order: read this first
world           who is there, and what each of them says; pure
stations        weather stations publish through named publishers (native)
dashboard       a live reader, from the last known values on (native)
shop            orders out, invoices in, over HTTP or gRPC: what rest_client and grpc_client share
rest_client     over REST and server-sent events, with nothing but Python's standard library
grpc_client     over gRPC
worker          turns orders into invoices, and fails now and then; a process that may be killed
pipeline        Spark: archives everything, and counts it in windows
broker_process  `runnel serve`, killed and started again
cast, child     the processes: started, listened to, ended
evidence        what everybody says happened, as data
invoices        what became of the orders, counted from their invoices; pure
counting        Spark's tables, counted again without Spark
proof           the claims, and whether they hold; pure
board, view     what the world looks like just now, on a terminal or line by line
report          the table at the end, and where to look further
picture         a screen as SVG
place           the directory that it all happens in
"""
