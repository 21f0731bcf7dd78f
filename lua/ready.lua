--[[ Answers if the server can do the store's work, on a key that is gone afterwards.
     It runs every command that a request needs, in a script or by itself, or writes only: a tool for
     operators has other rights. One that only looks writes nothing.
     One script, because a ping would come back from a server that refuses every write, and from one that
     has taken a right away from the user.
     It has no flags line, so that a server too old for one can still say that it is too old.

  KEYS[1]  mark         (string; holds nothing of interest)
  ARGV[1]  kept for     (milliseconds; in case that it may not be removed)
  ARGV[2]  work         (0: nothing but what a write is refused for, 1: a write, 2: every command)
  Returns  1 ready
         | 2 too old
]]
local time = redis.call('TIME')
local key, kept_for, work = KEYS[1], ARGV[1], ARGV[2]

if not redis.REDIS_VERSION_NUM then return {2} end
-- A write of a key that is not there: a replica refuses it, and it changes nothing.
if work == '0' then
  redis.call('SET', key, time[1], 'XX', 'PX', kept_for)
  return {1}
end
redis.call('SET', key, time[1], 'PX', kept_for)
if work == '1' then return {1} end
redis.call('SET', key, time[1], 'NX', 'GET', 'PX', kept_for)
redis.call('GET', key)
redis.call('EXISTS', key)
redis.call('STRLEN', key)
redis.call('GETRANGE', key, '0', '-1')
redis.call('SETRANGE', key, '0', '1')
redis.call('PEXPIRE', key, kept_for)
redis.call('PEXPIRETIME', key)
redis.call('RENAME', key, key)
redis.call('UNLINK', key)
return {1}
