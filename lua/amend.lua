#!lua flags=allow-oom
--[[ Puts an answer in the place of one that nobody can read.
     One script, because the record must still be the one that somebody saw.
     It may exceed maxmemory, as settling may.

  KEYS[1]  record     (string; the layout stands in src/record/codec.rs)
  ARGV[1]  seen       (27 bytes: state, holder, attempt, moment)
  ARGV[2]  retention  (milliseconds)
  ARGV[3]  response   (bytes, opaque, at least one)
  Returns  1 resolved
         | 2 changed
         | 3 unreadable
]]
local time = redis.call('TIME')
local key, seen, retention, response = KEYS[1], ARGV[1], ARGV[2], ARGV[3]

local sub, pack = string.sub, struct.pack
local NOBODY = string.rep('\0', 16)
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local record = redis.call('GET', key)
if not record then return {2} end

local version, state = string.byte(record, 1, 2)
if version ~= 1 or #record < 84 then return {3} end
local at, granted, noted = struct.unpack('>I6I4I4', record, 71)
local answer = #record - 84 - noted
if state < 1 or state > 7 or answer ~= (state == 4 and math.max(granted, 1) or 0) then return {3} end
if state ~= 4 then return {2} end

if sub(record, 2, 2) .. sub(record, 39, 58) .. sub(record, 71, 76) == seen then
  local kept = sub(record, 3, 38) .. NOBODY .. sub(record, 55, 70)
  -- Later than what was seen, also within one millisecond: it is amended once.
  record = '\1\4' .. kept .. pack('>I6I4I4', math.max(now, at + 1), #response, 0) .. response
  redis.call('SET', key, record, 'PX', retention)
  return {1}
end

-- Amended already, in the same way: this is the same sent again.
if sub(record, 39, 54) == NOBODY and sub(record, 85 + noted) == response then return {1} end
return {2}
