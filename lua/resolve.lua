#!lua flags=allow-oom
--[[ Settles an outcome that was unknown, as somebody found it out.
     One script, because the record must still be the one that was judged. The holder is cleared, so
     that a paused handler cannot complete any more.
     It may exceed maxmemory: settling is what lets the key end.

  KEYS[1]  record     (string; the layout stands in src/record/codec.rs)
  ARGV[1]  holder     (16 bytes)
  ARGV[2]  attempt    (decimal)
  ARGV[3]  retention  (milliseconds)
  ARGV[4]  response   (bytes, opaque, at least one; left out if nothing happened)
  Returns  1 resolved
         | 2 changed
         | 3 unreadable
]]
local time = redis.call('TIME')
local key, holder, judged, retention, response = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]

local sub, pack = string.sub, struct.pack
local NOBODY = string.rep('\0', 16)
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
local at, granted, noted = struct.unpack('>I6I4I4', record, 71)
local answer = #record - 84 - noted
if state < 1 or state > 5 or answer ~= (state == 4 and math.max(granted, 1) or 0) then return {3} end

if struct.unpack('>I4', record, 55) ~= judged then return {2} end
local owner = sub(record, 39, 54)
-- An ended lease is unknown too, only that nobody has claimed the key since. A deadline more than
-- two leases away was written before the clock went back.
local unknown = state == 3 or ((state == 1 or state == 5) and (now >= at or at - now > granted * 2))

if unknown and owner == holder then
  local kept = sub(record, 3, 38) .. NOBODY .. sub(record, 55, 70)
  if response then
    record = '\1\4' .. kept .. pack('>I6I4I4', now, #response, 0) .. response
  else
    record = '\1\2' .. kept .. pack('>I6I4I4', now, 0, 0)
  end
  redis.call('SET', key, record, 'PX', retention)
  return {1}
end

-- Settled from outside already, in the same way: this is the same resolution sent again.
if owner == NOBODY then
  if response then
    if state == 4 and sub(record, 85 + noted) == response then return {1} end
  elseif state == 2 then
    return {1}
  end
end
return {2}
