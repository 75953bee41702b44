# The socket is there before tombolod is, and stays: what is asked meanwhile waits.
"$PROXY" activate /run/docker/plugins/tombolo.sock "$BIN/tombolod" >>/run/tombolod.log 2>&1 &
dockerd
docker network create -d tombolo --subnet 10.9.0.0/24 net >/dev/null
run web --network net -p 8080:80
for how in -15 -9; do
	kill $how "$(cat /run/tombolod.pid)"
	run other --network net # a second before the next tombolod
	docker rm -f other >/dev/null
	same web "$(page 192.168.50.2 8080)"
	eventually within '1 attachment'
done
clean
# A tombolod that cannot run, here since another has its directory, hangs nothing.
ended=$(cat /run/tombolod.pid)
kill "$ended"
while kill -0 "$ended" 2>/dev/null; do sleep 0.01; done
SOCKET=/run/other.sock
tombolod
SECONDS=0
never docker network create -d tombolo --subnet 10.9.0.0/24 net
[ $SECONDS -lt 60 ] || fail "it took $SECONDS s"
