router; tombolod; dockerd; lan
# A name, or a MAC, is what a lease lasts by.
run mac --network lan --mac-address 02:42:00:00:00:77
run db --network name=lan,driver-opt=tombolo.name=db
run other --network lan
mac=$(ip_of mac) db=$(ip_of db)
holds grep -q " $db db " /run/leases # the host name
holds eval "tombolo ls | grep ' db ' | grep -q $db"
holds eval "docker exec mac ip link show dev eth0 | grep -q 02:42:00:00:00:77"
# A second one is refused, and what is no name.
refused "has 02:42:00:00:00:77" run mac2 --network lan --mac-address 02:42:00:00:00:77
refused "(db): stop it" run db2 --network name=lan,driver-opt=tombolo.name=db
refused "tombolo.nam is not known" run db3 --network name=lan,driver-opt=tombolo.nam=db
refused "letters" run db4 --network name=lan,driver-opt=tombolo.name=../x
docker restart -t 0 mac db other >/dev/null
same "$mac" "$(ip_of mac)"
same "$db" "$(ip_of db)"
docker rm -f mac db >/dev/null
run mac --network lan --mac-address 02:42:00:00:00:77
run db --network name=lan,driver-opt=tombolo.name=db
same "$mac" "$(ip_of mac)"
same "$db" "$(ip_of db)"
clean
