--[[ Answers if the server can do the store's work: run a script, read the clock, write a key.
     One script, because a ping would come back from a server that refuses every write.
     It has no flags line, so that a server too old for one can still say that it is too old.

  KEYS[1]  mark         (string; holds nothing of interest)
  ARGV[1]  kept for     (milliseconds)
  Returns  1 ready
         | 2 too old
]]
local time = redis.call('TIME')
local key, kept_for = KEYS[1], ARGV[1]

if not redis.REDIS_VERSION_NUM then return {2} end
redis.call('SET', key, time[1], 'PX', kept_for)
return {1}
