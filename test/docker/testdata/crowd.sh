router; tombolod; dockerd; lan
for i in $(seq 50); do docker run -d --name c$i --network lan box sleep 1000 >/dev/null & jobs[i]=$!; done
for i in $(seq 50); do wait "${jobs[i]}" || fail "container $i"; done
same 50 "$(leased | uniq | wc -l)"
eventually within '50 attachments'
for i in $(seq 50); do holds reaches "$(ip_of c$i)"; done
clean
