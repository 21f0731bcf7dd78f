#!lua flags=allow-oom
--[[ Gives a claim up: nothing happened, or nobody knows.
     One script, because a claim that somebody has taken over meanwhile must stay as it is.
     It may exceed maxmemory: a key must not stay taken because Redis is full.

  KEYS[1]  record     (string; the layout stands in src/record/codec.rs)
  ARGV[1]  holder     (16 bytes)
  ARGV[2]  retention  (milliseconds)
  ARGV[3]  verdict    (1 no effect, 2 unknown)
  Returns  1 released
         | 2 not held
         | 3 unreadable
]]
local time = redis.call('TIME')
local key, holder, retention, unknown = KEYS[1], ARGV[1], ARGV[2], ARGV[3] == '2'

local sub = string.sub
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local record = redis.call('GET', key)
if not record then return {2} end

local version, state = string.byte(record, 1, 2)
if version ~= 1 or #record < 84 then return {3} end
-- The first claim of a key leaves its times to the key's expiry. Here they are written out.
if state == 6 or state == 7 then
  local till = redis.call('PEXPIRETIME', key) - struct.unpack('>I6', record, 71)
  if till > 0 then
    local made = math.max(till - struct.unpack('>I4', record, 77), 0)
    local fence = struct.unpack('>I6', record, 59)
    if fence + 1000 < made then fence = made end
    state = state == 6 and 1 or 5
    record = '\1' .. string.char(state) .. sub(record, 3, 58)
      .. struct.pack('>I6I6I6', fence, made, till) .. sub(record, 77)
  end
end
local length, noted = struct.unpack('>I4I4', record, 77)
local answer = #record - 84 - noted
if state < 1 or state > 5 or answer ~= (state == 4 and math.max(length, 1) or 0) then return {3} end

if sub(record, 39, 54) ~= holder or state == 4 then return {2} end
local since = struct.pack('>I6I4', now, 0)
if unknown then
  if state == 2 then return {2} end
  if state ~= 3 then
    redis.call('SET', key, '\1\3' .. sub(record, 3, 70) .. since .. sub(record, 81), 'KEEPTTL')
  end
elseif state ~= 2 then
  -- A checkpoint is gone with what it marked.
  redis.call('SET', key, '\1\2' .. sub(record, 3, 70) .. since .. '\0\0\0\0', 'PX', retention)
end
return {1}
