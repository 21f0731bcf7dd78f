#!lua flags=no-writes
--[[ Looks at a record and changes nothing.
     One script, so that the bytes, the end of their time, and the clock belong together.

  KEYS[1]  record  (string; the layout stands in src/record/codec.rs)
  ARGV[1]  last    (index of the last byte that is wanted; -1 for all)
  Returns  1 found, now, when it goes (milliseconds; -1: never), length, bytes
         | 2 absent, now (milliseconds)
]]
local time = redis.call('TIME')
local key, last = KEYS[1], ARGV[1]
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local expires = redis.call('PEXPIRETIME', key)
if expires == -2 then return {2, now} end
return {1, now, expires, redis.call('STRLEN', key), redis.call('GETRANGE', key, 0, last)}
