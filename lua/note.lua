#!lua flags=allow-oom
--[[ Writes down what an operator changes, before and after it.
     One script, because a plain command is refused when memory is short, and settling what is
     unknown must be possible then.

  KEYS[1]  trail    (stream)
  ARGV[1]  id       (16 bytes)
  ARGV[2]  key      (24 bytes, the storage key)
  ARGV[3]  action   (text)
  ARGV[4]  who      (text)
  ARGV[5]  why      (text)
  ARGV[6]  outcome  (text; none before the change)
  ARGV[7]  length   (decimal: how many entries are kept, about)
  Returns  1 noted
]]
local time = redis.call('TIME')
local key = KEYS[1]
local at = time[1] * 1000 + math.floor(time[2] / 1000)

redis.call('XADD', key, 'MAXLEN', '~', ARGV[7], '*', 'id', ARGV[1], 'at', at, 'key', ARGV[2],
  'action', ARGV[3], 'who', ARGV[4], 'why', ARGV[5], 'outcome', ARGV[6])
return {1}
