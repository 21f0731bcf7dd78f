--[[ Tries to become the one who runs the handler of a key.
     One script, because a record that is read in one step and written in another can be claimed twice.
     It has no flags line: with one, a full Redis would refuse even the replay of a finished answer.
     A new record then gets OOM from its own SET.
     What comes first is what nearly every claim needs, in as few strings and calls as it takes.

  KEYS[1]  record    (string; the layout stands in src/record/codec.rs)
  ARGV[1]  claimant  (52 bytes: recipe id and digest 36, holder 16, as in the record)
  ARGV[2]  lease     (milliseconds)
  ARGV[3]  kept for  (milliseconds: the lease, and the retention of an unknown outcome)
  ARGV[4]  mode      (1 refuse, 2 reexecute what expired; 3, 4 the same with effects marked by checkpoints)
  ARGV[5]  accepted  (up to 3 times 36 bytes: recipe id and digest by older recipes; left out if none)
  Returns  1 acquired, attempt, fence, created (milliseconds), takeover (0 or 1), checkpoint
         | 2 in flight, remaining (milliseconds)
         | 3 completed, response
         | 4 mismatch
         | 5 indeterminate, holder, attempt, fence, checkpoint
         | 6 unreadable
         | 7 large
         | 8 first, now (milliseconds)
]]
local time = redis.call('TIME')
local key, claimant, lease, kept_for, mode = KEYS[1], ARGV[1], ARGV[2] + 0, ARGV[3], ARGV[4]
local micros = time[2] + 0
local now = time[1] * 1000 + (micros - micros % 1000) / 1000
local till, granting = now + lease, lease
if till > 281474976710655 then till = 281474976710655 end
if granting > 4294967295 then granting = 4294967295 end
-- The first two bytes of a new attempt: in flight, or in flight and untouched.
local begun = (mode == '1' or mode == '2') and '\1\1' or '\1\5'

-- A large answer stays where it is: it is not copied through Lua, and the caller reads it by itself.
local record = redis.call('GETRANGE', key, '0', '4095')
if record == '' then
  -- NX, because a string with nothing in it is no record, but it is there.
  local first = begun .. claimant
    .. struct.pack('>I4I6I6I6I4I4', 1, now, now, till, granting, 0)
  if not redis.call('SET', key, first, 'NX', 'PX', kept_for) then return {6} end
  return {8, now}
end

local sub = string.sub
local version, state = string.byte(record, 1, 2)
if version ~= 1 or #record < 84 then return {6} end
local attempt, fence, created, at, granted, noted = struct.unpack('>I4I6I6I6I4I4', record, 55)
local large = #record == 4096
local length = large and redis.call('STRLEN', key) or #record
if large and state ~= 4 then record = redis.call('GET', key) end
local answer = length - 84 - noted
if state < 1 or state > 5 or answer ~= (state == 4 and math.max(granted, 1) or 0) then return {6} end

if state ~= 2 and sub(record, 3, 38) ~= sub(claimant, 1, 36) then
  local recipe, prints, same = sub(record, 3, 6), sub(claimant, 1, 36) .. (ARGV[5] or ''), nil
  for i = 1, #prints, 36 do
    if sub(prints, i, i + 3) == recipe then
      same = sub(prints, i + 4, i + 35) == sub(record, 7, 38)
      break
    end
  end
  if same == nil then return {6} end
  if not same then return {4} end
end

if state == 4 then
  if large then return {7} end
  return {3, sub(record, 85 + noted)}
end

local pack, owner, holder = struct.pack, sub(record, 39, 54), sub(claimant, 37)
local reexecute = mode == '2' or mode == '4'
local term = pack('>I6I4', till, granting)
local takeover = 0
if state == 1 or state == 5 then
  if owner == holder then
    redis.call('SET', key, sub(record, 1, 70) .. term .. sub(record, 81), 'PX', kept_for)
    -- The first reply may have been lost, and it may have said takeover.
    return {1, attempt, fence, created, attempt > 1 and 1 or 0, sub(record, 85)}
  end
  -- A deadline more than two leases away was written before the clock went back.
  if now < at and at - now <= granted * 2 then return {2, at - now} end
  -- One that died untouched leaves its key as free as if it had said so.
  if state == 1 and not reexecute then
    redis.call('SET', key, '\1\3' .. sub(record, 3, 70) .. pack('>I6I4', now, 0) .. sub(record, 81),
      'KEEPTTL')
    return {5, owner, attempt, fence, sub(record, 85)}
  end
  takeover = state == 1 and 1 or 0
elseif state == 2 then
  -- A claim that arrives after its own sender gave the key up has nobody behind it.
  if owner == holder then return {2, 0} end
else
  if not reexecute then return {5, owner, attempt, fence, sub(record, 85)} end
  takeover = 1
end

attempt = math.min(attempt + 1, 4294967295)
fence = math.min(math.max(fence + 1, now), 281474976710655)
-- What an earlier attempt may have done is not undone by one that has not begun.
if takeover == 1 then begun = '\1\1' end
redis.call('SET', key, begun .. claimant .. pack('>I4I6', attempt, fence)
  .. sub(record, 65, 70) .. term .. sub(record, 81), 'PX', kept_for)
return {1, attempt, fence, created, takeover, sub(record, 85)}
